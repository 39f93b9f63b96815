"""Studies: many short runs, shared by any number of workers, to see which settings train."""
