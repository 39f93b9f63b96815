"""The closed-form start: adapters computed from the teacher's activations instead of trained from a
random one.
"""
