"""The frozen base: how it is loaded, in which precision it is stored and computed, and proof that
it is so.
"""
