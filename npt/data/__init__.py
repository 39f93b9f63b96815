"""Data: from files, hub and built-in text to batches, resumable at any sample.

A record passes source and readers (read), encoding (tokens), samples (cut, in order), loader
(mixed, prepared ahead) and batch. docs/extend/data-reader.md shows how to add a reader.
"""

from npt.data import prose, readers, source
from npt.data.source import register_reader

__all__ = ["register_reader"]

register_reader(".txt", readers.read_text)
register_reader(".jsonl", readers.read_json_lines)
register_reader(".json", readers.read_json)
register_reader(".csv", readers.read_csv)
register_reader(".parquet", readers.read_parquet, needs="datasets")
register_reader(source.BUILTIN, readers.read_builtin)
register_reader(source.PROSE, prose.read_prose)
register_reader(source.HUB, readers.read_hub, needs="datasets")
