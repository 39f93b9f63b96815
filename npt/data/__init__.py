"""Data: from files, hub and built-in text to batches, resumable at any sample.

A record passes source and lines (read), encoding (tokens), samples (cut, in order), loader (mixed,
prepared ahead) and batch. The tables below say what can be read; docs/extend/data-reader.md shows
how to add to them from outside.
"""

from npt.data import encoding, lines, prose, readers, record_forms, source
from npt.data.content import Content, register_form
from npt.data.source import register_reader

__all__ = ["Content", "register_form", "register_reader"]

register_reader(".txt", readers.read_text)
register_reader(".jsonl", lines.JSON_LINES.read)
register_reader(".json", readers.read_json)
register_reader(".csv", readers.CSV.read)
register_reader(".parquet", readers.read_parquet, needs="datasets")
register_reader(source.BUILTIN, readers.read_builtin)
register_reader(source.PROSE, prose.read_prose)
register_reader(source.HUB, readers.read_hub, needs="datasets")

# Asked from the last to the first; a named text column goes before all but token ids.
register_form("text", (), encoding.plain_text)
register_form("messages", ("messages",), record_forms.conversation)
register_form("ShareGPT", ("conversations",), record_forms.conversation)
register_form("prompt and completion", ("prompt", "completion"), record_forms.prompt_texts)
register_form("Alpaca", ("instruction", "output"), record_forms.alpaca)
register_form("token ids", ("input_ids",), record_forms.given_ids)
