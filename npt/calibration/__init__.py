"""The closed-form start: adapters computed from the teacher's activations and gradients."""
