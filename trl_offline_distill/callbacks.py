"""Pictures of a run."""

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


# One panel each: title, unit, and the metrics in it with their labels
PANELS = (
    ("Loss", "nats a token", {"loss": "trained", "kd_loss": "divergence", "ce_loss": "cross-entropy"}),
    ("Entropy", "nats", {"entropy": "student", "teacher_entropy": "teacher (support and tail)"}),
    (
        "Agreement of the most likely token",
        "share of positions",
        {"teacher_agreement": "with the teacher", "mean_token_accuracy": "with the label"},
    ),
    (
        "Mass on the teacher's support",
        "probability",
        {"captured_mass": "teacher", "student_mass": "student"},
    ),
    ("Speed", "tokens a second", {"tokens_per_second": "training"}),
    (
        "Schedule",
        "value over its maximum",
        {"learning_rate": "learning rate", "kd_weight": "kd_weight", "ce_weight": "ce_weight"},
    ),
)


def plot_log_history(log_history: list[dict[str, Any]], path: str | os.PathLike, title: str | None = None) -> Path:
    """
    Draws the curves of a run, training solid and evaluation dashed, one panel a kind of metric.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`, or the `log_history` of a `trainer_state.json`.
        path (`str` or `os.PathLike`):
            PNG file to write.
        title (`str`, *optional*):
            Title of the picture.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if nothing that can be drawn was logged.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    # Evaluation prefixes may be `eval_` or `eval_<set>_`
    prefixes = [""]
    prefixes += sorted(
        {key.removesuffix("kd_loss") for entry in log_history for key in entry if key.endswith("_kd_loss")}
    )
    panels = []
    for heading, unit, metrics in PANELS:
        lines = []
        for metric, label in metrics.items():
            for prefix in prefixes:
                points = [(entry["step"], entry[prefix + metric]) for entry in log_history if prefix + metric in entry]
                if points:
                    lines.append((label, prefix.rstrip("_"), points))
        if heading == "Schedule":  # rates and weights differ by orders of magnitude
            scaled = []
            for label, prefix, points in lines:
                largest = max(value for _, value in points) or 1.0
                scaled.append((label, prefix, [(step, value / largest) for step, value in points]))
            lines = scaled
        if lines:
            panels.append((heading, unit, lines))
    if not panels:
        raise ValueError("`log_history` holds no metric of a distillation run: pass `trainer.state.log_history`.")

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (heading, unit, lines) in zip(axes.flat, panels):
        colours = {}
        for label, prefix, points in lines:
            colour = colours.setdefault(label, f"C{len(colours)}")
            few = len(points) < 30
            axis.plot(
                *zip(*points),
                color=colour,
                linestyle="--" if prefix else "-",
                marker="o" if few else None,
                markersize=3,
                linewidth=1.4,
                label=f"{label}, {prefix}" if prefix else label,
            )
        axis.set_title(heading, fontsize=11)
        axis.set_ylabel(unit)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


class DistillationPlotCallback(TrainerCallback):
    """
    Draws the curves of the run to a PNG, each time a checkpoint is saved and when training ends.

    Needs matplotlib: `pip install trl-offline-distill[plot]`.

    Args:
        path (`str` or `os.PathLike`, *optional*):
            File to write. Defaults to `distillation_curves.png` in the output folder of the run.
        title (`str`, *optional*):
            Title of the picture.

    Example:

    ```python
    >>> trainer = OfflineDistillationTrainer(..., callbacks=[DistillationPlotCallback()])
    ```
    """

    def __init__(self, path: str | os.PathLike | None = None, title: str | None = None):
        self.path, self.title = path, title

    def on_save(self, args, state, control, **kwargs):
        self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        if state.is_world_process_zero and any("loss" in entry for entry in state.log_history):
            path = self.path if self.path is not None else Path(args.output_dir) / "distillation_curves.png"
            plot_log_history(state.log_history, path, self.title)
