import json

import pytest
from tiny_students import cached_dataset, make_trainer, tiny_model, token_rows

from trl_offline_distill.callbacks import DistillationPlotCallback, plot_log_history


pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    cache = cached_dataset(token_rows([6] * 8, prompt=2), tiny_model(seed=1).eval())
    trainer = make_trainer(
        folder,
        tiny_model(),
        cache,
        eval_dataset=cache,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=4,
        ce_weight=0.0,
        ce_weight_schedule="linear",
        ce_weight_end=0.5,
        trainer_kwargs={"callbacks": [DistillationPlotCallback(title="A tiny run")]},
    )
    trainer.train()
    return folder, trainer


def test_draws_when_saved_and_when_done(run):
    folder, _ = run
    picture = folder / "distillation_curves.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert pyplot.imread(picture).shape[0] > 800
    assert not pyplot.get_fignums()


def test_draws_a_saved_state(run, tmp_path):
    folder, _ = run
    history = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert plot_log_history(history, tmp_path / "new" / "curves.png").exists()


def test_every_curve_is_what_was_logged(run, tmp_path, monkeypatch):
    _, trainer = run
    drawn = {}
    close = pyplot.close

    def keep(figure):
        for axis in figure.axes:
            for line in axis.get_lines():
                drawn[axis.get_title(), line.get_label()] = line.get_xydata().tolist()
        close(figure)

    monkeypatch.setattr(pyplot, "close", keep)
    plot_log_history(trainer.state.log_history, tmp_path / "curves.png")
    logged = trainer.state.log_history
    expected = [[entry["step"], entry["kd_loss"]] for entry in logged if "kd_loss" in entry]
    assert drawn["Loss", "divergence"] == expected
    expected = [[entry["step"], entry["eval_student_mass"]] for entry in logged if "eval_student_mass" in entry]
    assert drawn["Mass on the teacher's support", "student, eval"] == expected
    weights = drawn["Schedule", "ce_weight"]
    assert max(value for _, value in weights) == 1.0


def test_several_evaluation_sets_and_nothing_to_draw(tmp_path):
    history = [{"step": 1, "eval_a_kd_loss": 1.0}, {"step": 1, "eval_b_kd_loss": 2.0}]
    assert plot_log_history(history, tmp_path / "curves.png").exists()
    with pytest.raises(ValueError, match="`log_history` holds no metric"):
        plot_log_history([{"step": 1, "mine": 1.0}], tmp_path / "curves.png")
