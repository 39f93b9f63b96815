"""The page about a run, `report.html`: made of the run's folder alone, so that it can be made again
wherever that folder is.
"""
