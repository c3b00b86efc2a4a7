# SPDX-License-Identifier: Apache-2.0
"""Make a small Qwen3 model with random weights and a tokenizer of its own; nothing is downloaded.

    python -m scripts.make_test_model [OUT_DIR] [--layers N] [--hidden N] [--seed N]

Its text means nothing, but its attention is real: the weights are large enough for the next token to
depend on all the tokens before it, so a KV cache that holds the wrong block changes the output. The same
arguments give the same bytes. More layers or a wider hidden size make it slower, never cleverer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_DIR = Path("build/test-model")
COMPLETE = "test-model.json"
"""Written last; holds the `Shape` that the folder was made with."""

HEAD_DIM = 64
VOCABULARY = 1024
MAX_POSITION = 32768
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
_AGENT_TEXT = """\
You are a helpful agent. Use the tools below when you need them; answer in plain text when you are done.
User: find the failing test, read the file, fix the function and run the tests again, please.
{"name": "read_file", "arguments": {"path": "src/main.py", "offset": 0, "limit": 200}}
{"name": "run_command", "arguments": {"command": "python -m pytest -q tests", "timeout": 60}}
def main(arguments: list[str]) -> int:
    for index, value in enumerate(arguments):
        if value is None or not value.strip():
            raise ValueError(f"argument {index} is empty")
        print(index, value)
    return 0
The planner splits the task, each worker returns its result, and the reviewer reads all of them.
"""
_CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{ '\\n<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the model's weights."""

    layers: int = 4
    hidden: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that attention heads do not divide."""
        if self.layers < 1 or self.hidden < 2 * HEAD_DIM or self.hidden % (2 * HEAD_DIM):
            raise ValueError(
                f"need at least 1 layer and a hidden size that is a multiple of {2 * HEAD_DIM}, "
                f"not {self.layers} layers and {self.hidden}"
            )


def make_test_model(out_dir: Path = DEFAULT_DIR, *, layers: int = 4, hidden: int = 256, seed: int = 0) -> Path:
    """Make the model in `out_dir`, unless it is there with just these arguments; return `out_dir`.

    The folder appears whole or not at all, so two processes may ask for it at the same time.
    """
    shape = Shape(layers, hidden, seed)
    if _made_with(out_dir) == shape:
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        fresh = Path(scratch) / "model"
        _tokenizer().save_pretrained(fresh)
        _save_weights(fresh, shape)
        (fresh / COMPLETE).write_text(json.dumps(dataclasses.asdict(shape)) + "\n")
        if out_dir.exists():
            shutil.move(out_dir, Path(scratch) / "old")
        try:
            os.rename(fresh, out_dir)
        except OSError:
            # Another process was faster; what it made is as good if its arguments were the same.
            if _made_with(out_dir) != shape:
                raise
    return out_dir


def _made_with(out_dir: Path) -> Shape | None:
    """Return the shape a complete model in `out_dir` was made with."""
    try:
        return Shape(**json.loads((out_dir / COMPLETE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on text that never changes: the license and a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_LICENSE.read_text(), _AGENT_TEXT], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the text gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        model_max_length=MAX_POSITION,
        chat_template=_CHAT_TEMPLATE,
    )


def _save_weights(out_dir: Path, shape: Shape) -> None:
    """Draw the weights from the seed and save them as bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_DIM,
        num_key_value_heads=shape.hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        tie_word_embeddings=True,
        # The default of 0.02 makes layers so weak that the last token decides nearly alone.
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = Qwen3ForCausalLM(config)
        # transformers wraps `to` in a decorator whose types lose the argument.
        model.to(torch.bfloat16)  # type: ignore[arg-type]
        model.save_pretrained(out_dir)


def main() -> None:
    """Make the model named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", type=Path, nargs="?", default=DEFAULT_DIR)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_test_model(args.out_dir, layers=args.layers, hidden=args.hidden, seed=args.seed))


if __name__ == "__main__":
    main()
