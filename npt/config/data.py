"""Settings of the data and of the samples made from them."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from npt.config.field import Condition, SettingsGroup, at_least, setting
from npt.errors import ConfigError

if TYPE_CHECKING:
    from npt.config.training import TrainConfig

REPLAY_RATIO = 0.2
_data = partial(setting, group="data")
_PAIR = Condition(lambda c: c.prompt_column is not None, "--prompt_column")
_REPLAYED = Condition(lambda c: c.replay_dataset is not None, "--replay_dataset")


@dataclass(frozen=True, kw_only=True)
class DataConfig(SettingsGroup):
    """The data, and how samples are made from them."""

    dataset_name: str = _data(
        "builtin",
        "builtin (Python code), builtin-prose (English), a file, folder or glob (.txt .jsonl .json"
        " .csv .tsv .parquet .arrow), a saved dataset, or a dataset on the Hub",
    )
    dataset_config: str | None = _data(None, "configuration of a dataset on the Hub")
    dataset_split: str = _data(
        "train", "split to train on, of the Hub, a saved dataset or a folder"
    )
    text_column: str = _data("text", "column that holds the text")
    prompt_column: str | None = _data(
        None, "column that holds the prompt, as text or as chat messages"
    )
    completion_column: str | None = _data(
        None, "column that holds the completion (default for messages: the last answer)", need=_PAIR
    )
    context_column: str | None = setting(
        None,
        "column that holds a context for the teacher alone: the student learns to do without it;"
        " for chat messages it is the system message",
        group="objective",
    )
    streaming: bool = _data(False, "read the data during training instead of loading it all first")
    num_samples: int | None = _data(
        None, "maximum number of samples, before packing (default: all)", bound=at_least(1)
    )
    max_length: int = _data(
        256,
        "maximum number of tokens per sample; a longer text becomes several samples",
        bound=at_least(2),
    )
    packing: bool = _data(
        False, "pack short documents into one row; they do not attend to each other"
    )
    replay_dataset: str | None = _data(None, "second dataset to mix in, to reduce forgetting")
    replay_ratio: float | None = _data(
        None,
        f"share of samples from --replay_dataset (default: {REPLAY_RATIO})",
        bound=Condition(lambda value: 0 < value < 1, "it must be above 0 and below 1"),
        need=_REPLAYED,
    )

    def check(self) -> None:
        """Refuse the same column for two texts, and contexts in packed rows."""
        prompt = self.prompt_column
        if prompt is not None and prompt == self.completion_column:
            raise ConfigError(
                f"--prompt_column and --completion_column are both {prompt!r}: name two columns"
            )
        if self.context_column is not None:
            self._check_context(self.context_column)

    def _check_context(self, context: str) -> None:
        texts: tuple[str | None, ...] = (self.prompt_column, self.completion_column)
        if self.prompt_column is None:
            texts = (self.text_column,)
        if context in texts:
            raise ConfigError(
                f"--context_column {context} is the column of another text too: name the context's"
                " own"
            )
        if self.packing:
            raise ConfigError(
                f"--packing does not support --context_column {context}: remove one of them"
            )

    def check_objective(self, training: "TrainConfig") -> None:
        """Refuse contexts if the loss needs more of the teacher than its logits."""
        if self.context_column is not None and not training.reads_logits_alone:
            raise ConfigError(
                f"--context_column {self.context_column} gives the teacher other rows than the"
                " student, so only their logits can be compared: use --strategy end_to_end,"
                " --logit_kl_weight above 0, --hidden_weight 0 and --logit_loss kl or reverse_kl"
            )

    @property
    def replay_share(self) -> float:
        """Share of samples from the replay dataset, if there is one."""
        return REPLAY_RATIO if self.replay_ratio is None else self.replay_ratio
