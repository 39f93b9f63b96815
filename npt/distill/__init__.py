"""Teacher-student distillation: losses, strategies, stages."""
