"""HTML pages. `report.html` is built from the run folder alone, so it can be rebuilt anywhere."""
