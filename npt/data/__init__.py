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


_TEXT = {
    ".txt": "read_text",
    ".jsonl": "read_json_lines",
    ".ndjson": "read_json_lines",
    ".json": "read_json",
    ".csv": "read_csv",
    ".tsv": "read_csv",
}
for suffix, name in _TEXT.items():
    for compression, needs in {"": None, **source.COMPRESSIONS}.items():
        register_reader(suffix + compression, _late(name), needs=needs)
for suffix in (".parquet", ".arrow"):
    register_reader(suffix, _late("read_table"), needs="datasets")
register_reader(source.SAVED, _late("read_saved"), needs="datasets")
register_reader(source.BUILTIN, _late("read_builtin"))
register_reader(source.PROSE, _late("read_prose", "npt.data.prose"))
register_reader(source.HUB, _late("read_hub"), needs="datasets")
