"""How nearly the student is its teacher: figures, each with its standard error, and their table."""
