"""Makes the golden files beside it with the public classes: python tests/model/golden/make.py

Needs `pip install torch transformers` (made with torch 2.13.0, transformers 5.24.0), which no test does. Each folder has a
small random checkpoint as `save_pretrained` writes it and, in `expected.npz`, what the public class computes in float32. The
numbers are drawn and computed here and under the licence of this repository.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 512, "use_cache": False}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def deepseek(rope: dict) -> DeepseekV3Config:
    return DeepseekV3Config(
        **COMMON,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=12,
        routed_scaling_factor=2.0,
        rope_parameters=rope,
        num_mtp_layers=0,
    )


def llama() -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**COMMON, **shape, rope_parameters=rope, tie_word_embeddings=True, rms_norm_eps=1e-5)


def draw(model: torch.nn.Module) -> None:
    """Weights large enough that positions, gates and choices matter, all of them numbers of bfloat16."""
    torch.manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        scale, centre = (
            (0.1, 1.0) if "norm" in name else (0.05, 0.0) if name.endswith("bias") else (tensor.shape[-1] ** -0.5, 0.0)
        )
        tensor.data = (centre + scale * torch.randn(tensor.shape)).bfloat16().float()


def run(model: torch.nn.Module, tokens: torch.Tensor, every: int) -> dict[str, np.ndarray]:
    """Logits, every layer's output and every router's choice, at each `every`th position."""
    seen: dict[str, list] = {"hidden": [], "choice": []}
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, i, o: seen["hidden"].append(o[0] if isinstance(o, tuple) else o))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda m, i, o: seen["choice"].append(o[2].sort(-1).values))
    with torch.no_grad():
        logits = model(tokens).logits
    found = {"tokens": tokens.numpy().astype(np.int32), "logits": logits[:, ::every].numpy()}
    found["hidden"] = torch.stack(seen["hidden"])[:, :, ::every].numpy()
    if seen["choice"]:
        found["choice"] = torch.stack(seen["choice"]).reshape(len(seen["choice"]), *tokens.shape, -1)[:, :, ::every].numpy()
    return found


def save(folder: Path, model: torch.nn.Module, expected: dict[str, np.ndarray]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.bfloat16()
    for name, buffer in biases.items():  # stays float32, as released
        model.get_submodule(name.rsplit(".", 1)[0]).e_score_correction_bias = buffer
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", **expected)


def main() -> None:
    tokens = torch.randint(0, 64, (1, 401), generator=torch.Generator().manual_seed(1))
    expected = {}
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    for name, rope in (("yarn", YARN), ("plain", plain)):
        model = DeepseekV3ForCausalLM(deepseek(rope)).eval()
        draw(model)
        expected |= {f"{name}_{key}": value for key, value in run(model, tokens, 16).items()}
    save(HERE / "deepseek_v3", model, expected)
    yarn = json.loads((HERE / "deepseek_v3" / "config.json").read_text()) | {"rope_parameters": YARN}
    (HERE / "deepseek_v3" / "config_yarn.json").write_text(json.dumps(yarn, indent=2) + "\n")
    model = LlamaForCausalLM(llama()).eval()
    draw(model)
    save(HERE / "llama", model, run(model, tokens[:, :50], 1))


if __name__ == "__main__":
    main()
