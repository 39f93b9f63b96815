"""The modulation, the adapter that holds it, and how a model gains and loses adapters."""
