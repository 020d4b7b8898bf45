"""What the two servers are started with: a checkpoint, a named shape of random weights (for aiperf with a tokenizer made for it), or the demo's tiny
model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from benchmark import models
from benchmark.agentic import aiperf_driver, direct_driver, tokenizer
from benchmark.serve import server
from sgl_lowlatency.cli import server_setup

MARGIN_TOKENS = 1024  # of context beyond the traces' longest request: a chat template adds tokens to every message
SIMULATED = {"SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
MAX_BATCH = 16  # decode graphs are captured up to here: subagents add requests to the sessions' own


class SetupRefused(ValueError):
    """Arguments that cannot be served; the message says what is accepted."""


@dataclass(frozen=True)
class Setup:
    """arguments: of sglang.launch_server, without port and the plugin's flag. model: slug of the results. vocab: ids in use. kernels_of: a
    model whose kernels may be compiled beside the servers' start, which else compile them one after the other."""

    arguments: list[str]
    environment: dict[str, str]
    model: str
    weights: str
    vocab: int
    tokenizer: str | None
    kernels_of: Path | None = None


def of(args: argparse.Namespace, work: Path, context: int) -> Setup:
    """The setup for `args` (smoke, model_path, model, layers, pool_tokens, driver, server_arg, simulate_acceptance, dry_run). Writes
    the model into `work` where it is made here. context: tokens the longest request needs. Raises SetupRefused."""
    extra = ["--stream-interval", "1", "--enable-cache-report", "--random-seed", "1", *args.server_arg]
    if args.driver == direct_driver.NAME:
        extra.append("--incremental-streaming-output")
    made = _model(args, work, context, extra)
    if args.simulate_acceptance is None:
        return made
    return dataclasses.replace(made, environment=made.environment | SIMULATED | {"SGLANG_SIMULATE_ACC_LEN": f"{args.simulate_acceptance:g}"})


def _model(args: argparse.Namespace, work: Path, context: int, extra: list[str]) -> Setup:
    if args.smoke:
        return _smoke(args, work, context, extra)
    if args.model_path is not None:
        return _checkpoint(args, work, context, extra)
    shape = models.named_shape(args.model, args.layers)
    shape = dataclasses.replace(shape, max_position=max(shape.max_position, context))
    path, has_text = work / "model", args.driver == aiperf_driver.NAME
    if not args.dry_run:
        models.write_model(path, shape)
        if has_text:
            tokenizer.write(path, shape.vocab, shape.max_position)
    arguments = ["--model-path", str(path), *([] if has_text else ["--skip-tokenizer-init"]), *_gpu(args, context), *extra]
    slug = args.model + (f"-{args.layers}-layers" if args.layers else "")
    return Setup(arguments, server.environment(work), slug, "real-scale random, seed 0", shape.vocab, str(path) if has_text else None, path)


def _checkpoint(args: argparse.Namespace, work: Path, context: int, extra: list[str]) -> Setup:
    path = args.model_path
    try:
        config = json.loads((path / "config.json").read_text())
        vocab, positions = config["vocab_size"], config["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise SetupRefused(f"--model-path {path}: no config.json of a model with vocab_size and max_position_embeddings: {error}") from None
    if context > positions:
        raise SetupRefused(
            f"the traces need {context} tokens of context, {path.name} has {positions} positions: leave longer sessions out with "
            f"--peak {positions - MARGIN_TOKENS}, or make shorter ones with --scale"
        )
    arguments = ["--model-path", str(path), *_gpu(args, context), *extra]
    return Setup(arguments, server.environment(work), path.name, f"checkpoint {path.name}", vocab, str(path))


def _gpu(args: argparse.Namespace, context: int) -> list[str]:
    if args.pool_tokens < context:
        raise SetupRefused(f"--pool-tokens {args.pool_tokens} is less than the {context} tokens of context that the traces need")
    return server.gpu_arguments(context=context, max_batch=MAX_BATCH, max_tokens=args.pool_tokens, radix=True)


def _smoke(args: argparse.Namespace, work: Path, context: int, extra: list[str]) -> Setup:
    from sgl_lowlatency.cli.tiny_model import TinyModel, make_tiny_model

    sizes, path = TinyModel(), work / "model"
    if context > sizes.max_position_embeddings:
        raise SetupRefused(f"the traces need {context} tokens of context, the smoke test's model has {sizes.max_position_embeddings}")
    if not args.dry_run:
        make_tiny_model(path, sizes)
    made = server_setup.server_setup(path, tuple(extra))
    arguments = [*made.arguments, "--context-length", str(sizes.max_position_embeddings)]
    return Setup(arguments, made.environment, "tiny-qwen3", "real-scale random, seed 0, 2 layers", sizes.vocab_size, str(path))
