"""The public names of npt.diagnostics, each with its home: the only list of them."""

from npt.recorder.callback import RecorderCallback as RecorderCallback
from npt.recorder.health import check as check
from npt.recorder.picture import write_pictures as write_pictures
from npt.recorder.ranking import explosions as explosions
from npt.recorder.ranking import gradients as gradients
from npt.recorder.ranking import worst as worst
from npt.recorder.record import Record as Record
from npt.recorder.record import Row as Row
from npt.recorder.recorder import Recorder as Recorder

__all__: list[str]
