"""The closed-form start: adapters solved from the teacher's activations instead of trained from a
random one.
"""
