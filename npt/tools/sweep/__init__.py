"""Studies: many short runs, shared by any number of workers, that show which settings train."""
