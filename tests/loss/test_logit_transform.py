from types import SimpleNamespace

import pytest
import torch

from trl_offline_distill.loss.logit_transform import LogitTransform, read_logit_transform


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        ({"model_type": "llama"}, 1.0, None),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, 1.0, 30.0),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 20.0}, 1.0, 20.0),
        ({"model_type": "xlstm", "output_logit_soft_cap": 15.0}, 1.0, 15.0),
        ({"model_type": "granite", "logits_scaling": 8.0}, 0.125, None),
        ({"model_type": "hyperclovax", "logits_scaling": 8.0}, 8.0, None),
        ({"model_type": "cohere", "logit_scale": 0.0625}, 0.0625, None),
        ({"model_type": "mpt", "logit_scale": None}, 1.0, None),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, 0.5, None),
        ({"model_type": "minicpm3", "dim_model_base": 256, "hidden_size": 1024}, 0.25, None),
    ],
)
def test_families(config, scale, softcap):
    assert read_logit_transform(SimpleNamespace(**config)) == LogitTransform(scale, softcap)


def test_slope_is_the_derivative():
    for transform in (LogitTransform(), LogitTransform(0.5), LogitTransform(2.0, 3.0)):
        raw = torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True)
        logits = transform(raw)
        (slope,) = torch.autograd.grad(logits.sum(), raw)
        torch.testing.assert_close(torch.as_tensor(transform.slope(logits)).expand(9).double(), slope)
