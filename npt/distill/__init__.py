"""Teacher-student distillation: losses and strategies."""
