"""Data: from files, the Hub and built-in text to batches, resumable at any sample.

Records pass source and readers (read), encoding (tokenise, cut into samples), samples (order, mix,
prefetch) and batch (collate). docs/extend/data-reader.md shows how to add a reader.
"""

from importlib import import_module

from npt.data import source
from npt.data.source import Read, register_reader

__all__ = ["register_reader"]


def _late(name: str, module: str = "npt.data.readers") -> Read:
    """Return a reader whose module is imported when it first reads."""
    return lambda place, config: getattr(import_module(module), name)(place, config)


register_reader(".txt", _late("read_text"))
register_reader(".jsonl", _late("read_json_lines"))
register_reader(".json", _late("read_json"))
register_reader(".csv", _late("read_csv"))
register_reader(".parquet", _late("read_parquet"), needs="datasets")
register_reader(source.BUILTIN, _late("read_builtin"))
register_reader(source.PROSE, _late("read_prose", "npt.data.prose"))
register_reader(source.HUB, _late("read_hub"), needs="datasets")
