"""The page about a run, `report.html`: read from the run's folder alone, so that it can be made again whenever and wherever that folder is."""
