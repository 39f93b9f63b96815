"""Code copied to exported folders. It does not import npt, and npt does not import it."""
