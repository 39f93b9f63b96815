"""The private names of other libraries that the guard uses, and that the installed versions have.

A library may rename them in any version. This is the one table of them; a name that the guard uses
and the table lacks fails as well.
"""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import npt.guard

ROOT = Path(npt.guard.__file__).parents[1]

FOREIGN = {
    "_after_closure": "lightning.pytorch.plugins.precision.precision",
    "_batches_that_stepped": "lightning.pytorch.loops.training_epoch_loop",
    "_buffered_inputs": "trl.trainer.grpo_trainer",
    "_current_train_step_time": "trl.trainer.grpo_trainer",
    "_debug_has_internal_overlap": "torch",
    "_entropy_window_stats": "trl.trainer.grpo_trainer",
    "_foreach_add_": "torch",
    "_foreach_copy_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_norm": "torch",
    "_foreach_sub_": "torch",
    "_get_num_items_in_batch": "transformers.trainer",
    "_getframe": "sys",
    "_globalstep_last_logged": "transformers.trainer",
    "_growth_tracker": "torch.amp.grad_scaler",
    "_initial_global_step": "transformers.trainer",
    "_is_flat_param": "torch.distributed.fsdp._flat_param",
    "_is_overflow": "accelerate.optimizer",
    "_last_world_entropy": "trl.trainer.grpo_trainer",
    "_logs": "trl.trainer.grpo_trainer",
    "_metrics": "trl.trainer.grpo_trainer",
    "_opt_called": "torch.optim.lr_scheduler",
    "_orig_mod": "torch._dynamo.eval_frame",
    "_replicated_grad_hook_registered": "transformers.trainer",
    "_stored_metrics": "trl.experimental.cpo.cpo_trainer",
    "_results": "lightning.pytorch.trainer.trainer",
    "_sync_buffers": "torch.nn.parallel.distributed",
    "_total_loss_scalar": "transformers.trainer",
    "_total_train_tokens": "trl.trainer.grpo_trainer",
    "_tr_loss": "transformers.trainer",
    "_track_num_input_tokens": "transformers.trainer",
    "_wrapped_by_lr_sched": "torch.optim.lr_scheduler",
}
"""The module whose file has each name, or the package that has it as a function."""


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def names_of_ours() -> set[str]:
    """Return the names that npt defines: functions, classes, attributes and variables."""
    found: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                if isinstance(owner, ast.Name) and owner.id == "self":
                    found.add(node.attr)
    return found


def test_the_table_has_the_names_that_the_guard_uses() -> None:
    ours = names_of_ours() - set(FOREIGN)  # a mixin sets some of its Trainer's
    used: set[str] = set()
    for path in (ROOT / "guard").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    assert {name for name in used if is_private(name)} - ours == set(FOREIGN)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_installed_version_has_the_name(name: str) -> None:
    package, _, module = FOREIGN[name].partition(".")
    if not module:
        assert hasattr(import_module(package), name), f"{package} has no {name} any more"
        return
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    # the file alone, since importing TRL takes half a minute
    file = Path(spec.origin).parent / (module.replace(".", "/") + ".py")
    assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), f"no {name} in {file}"
