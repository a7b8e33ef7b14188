"""Does a fine-tuning with Hugging Face's Trainer stay within its memory, with a checkpoint every second step?

    .venv/bin/python -m bench.fine_tune_memory      needs root (a memory cgroup) and some 20 GB of disk

A Llama of 1 GB of weights (fp32, made at random a tensor at a time, as safetensors files) is trained for six steps of one
sequence, in a store with a budget of 300 MiB. The whole process, its imports included, is in a memory cgroup. After its
imports the limit becomes what it has by then + 1.1 x the budget + 128 MiB + activations. A second process resumes from the
checkpoint of step 4 under the same limit, and has to log the losses of the first, bit for bit. Then the same training with
Trainer and parameters in memory, which the limit kills, to show that it holds. Prints Markdown; exits 1 where something is more
than was said.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.memory import anonymous_of, kills, limit_of, memory_cgroup, read_peak, usage
from tiered.types import format_size, parse_size

MIB = 1 << 20
SAID = 128 * MIB
"""What a process may take beside imports, 1.1 x the pool and activations; and what it may grow by while it saves."""
STEPS, SAVE, TOKENS = 6, 2, 32
LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
LLAMA |= {"vocab_size": 8000, "num_hidden_layers": 19, "max_position_embeddings": 128, "tie_word_embeddings": False}


# -- the child, in the cgroup -------------------------------------------------------------------------------------------------


def child(way: str, folder: Path, budget: int) -> None:
    """Train as ``way`` says: "train", "resume" or "memory". Each line on standard output begins a phase, and waits for one on
    standard input."""
    import torch
    import torch._dynamo
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

    from tiered import TieredStore
    from tiered.integrations.transformers import TieredTrainer, from_pretrained

    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    assert LlamaForCausalLM is not None  # imported before the memory of the imports is read

    def say(phase: str, **more: Any) -> None:
        print(json.dumps({"phase": phase, **more}), flush=True)
        sys.stdin.readline()

    class Saves:
        def _save_checkpoint(self, *given: Any, **options: Any) -> None:
            say("save")
            super()._save_checkpoint(*given, **options)  # type: ignore[misc]
            say("train")

    class InMemory(Saves, Trainer):  # type: ignore[misc]
        pass

    class Ours(Saves, TieredTrainer):
        pass

    tokens = torch.randint(0, LLAMA["vocab_size"], (STEPS, TOKENS), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        str(folder / ("memory-out" if way == "memory" else "out")),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=SAVE,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def losses(trainer: Any) -> dict[str, str]:
        return {str(one["step"]): float(one["loss"]).hex() for one in trainer.state.log_history if "loss" in one}

    say("imports")
    if way == "memory":
        trainer = InMemory(AutoModelForCausalLM.from_pretrained(folder / "weights"), args, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        say("train")
        trainer.train()
        say("end", losses=losses(trainer))
        return
    with TieredStore.open(folder / "store", dram=budget, keep=3) as store:
        say("read")
        existing = "resume" if way == "resume" else "refuse"
        model = from_pretrained(AutoModelForCausalLM, folder / "weights", store, existing=existing)
        trainer = Ours(model=model, args=args, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        say("train")
        trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{STEPS - SAVE}") if way == "resume" else None)
        if way == "train":
            say("export")
            trainer.save_model(str(folder / "tuned"))
        say("end", losses=losses(trainer), pool=store.statistics().tier("dram").peak)
        store.close()


# -- the parent ---------------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    name: str
    begins: int
    most: int
    seconds: float


@dataclass
class Ended:
    code: int
    imports: int = 0
    limit: int = 0
    peak: int = 0
    killed: int = 0
    phases: list[Phase] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def most(self, name: str) -> int:
        return max((phase.most for phase in self.phases if phase.name == name), default=0)

    @property
    def growth(self) -> int:
        """How much anonymous memory grew at most while it saved a checkpoint."""
        return max((phase.most - phase.begins for phase in self.phases if phase.name == "save"), default=0)


def under(way: str, folder: Path, budget: int, activations: int) -> Ended:
    """Run a child in a cgroup that gets its limit once the child has ended its imports. Its memory is read every millisecond
    or so."""
    with memory_cgroup(1 << 40) as group:
        if group is None:
            sys.exit("no memory cgroup can be made here: run it as root")
        knob = limit_of(group)
        command = [sys.executable, "-m", "bench.fine_tune_memory", "--child", way, str(folder), str(budget)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        ended, phase = Ended(-1), Phase("start", 0, 0, time.monotonic())
        while True:
            while not select.select([process.stdout], [], [], 0.001)[0]:
                phase.most = max(phase.most, anonymous_of(process.pid))
            line = process.stdout.readline()
            phase.seconds = time.monotonic() - phase.seconds
            ended.phases.append(phase)
            if not line:
                break
            now = anonymous_of(process.pid)
            phase.most = max(phase.most, now)
            ended.last = json.loads(line)
            phase = Phase(ended.last["phase"], now, now, time.monotonic())
            if phase.name == "imports":
                ended.imports = usage(group)
                ended.limit = (ended.imports + budget + budget // 10 + SAID + activations) // 4096 * 4096
                knob.write_text(str(ended.limit))
                for name in ("memory.max_usage_in_bytes", "memory.peak"):
                    if (group / name).exists():
                        (group / name).write_text("0")
            process.stdin.write("\n")
            process.stdin.flush()
        ended.code = process.wait()
        ended.killed = kills(group)
        ended.peak = read_peak(group) or 0
        return ended


def make(folder: Path) -> tuple[int, int, int]:
    """Write the weights, a tensor at a time. Returns bytes of weights, of the largest parameter, and of activations."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tiered import TensorSpec
    from tiered.format.safetensors import entry_of
    from tiered.format.safetensors_writer import Shards

    config = LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"], dtype="float32")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    entries = [entry_of(names[id(p)], TensorSpec("float32", tuple(p.shape), 4)) for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)

    def values(entry: Any) -> Any:
        shape = entry.spec.shape
        made = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        return made.view(-1).view(torch.uint8).numpy().data

    Shards(folder / "weights", entries, "250MB", "refuse").write(values(entry) for entry in entries)
    config.save_pretrained(folder / "weights")
    return sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters()), activations()


def activations() -> int:
    """Bytes that autograd keeps of a forward pass beside parameters, counted in models of one and of two such layers, and the
    largest of them once more, for its gradient."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def kept(layers: int) -> tuple[int, int]:
        model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": layers})).train()
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        seen: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata not in parameters:
                seen[tensor.untyped_storage()._cdata] = tensor
            return tensor

        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, labels=tokens)
        sizes = [tensor.untyped_storage().nbytes() for tensor in seen.values()]
        return sum(sizes), max(sizes)

    (one, _), (two, largest) = kept(1), kept(2)
    return one + (LLAMA["num_hidden_layers"] - 1) * (two - one) + largest


def row(what: str, ended: Ended) -> str:
    cells = [what, format_size(ended.imports), format_size(ended.limit), format_size(ended.peak)]
    anonymous = max(phase.most for phase in ended.phases)
    cells += [format_size(anonymous), format_size(ended.growth) if ended.growth else "-"]
    cells += [f"{sum(phase.seconds for phase in ended.phases):.0f} s"]
    cells += [f"killed by the kernel ({ended.killed})" if ended.killed else f"ended with {ended.code}"]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dram", default="300MiB", help="the store's budget (default: 300MiB)")
    parser.add_argument("--dir", default=".", help="where the files are made, and removed (default: .)")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "FOLDER", "BYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), int(options.child[2]))
        return 0
    budget = parse_size(options.dram)
    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="bench-fine-tune-")).resolve()
    try:
        weights, largest, activations = make(folder)
        print(
            f"{weights:,} bytes of weights, {format_size(largest)} the largest parameter; a budget of {format_size(budget)}; "
            f"activations of a batch of {TOKENS} tokens: {format_size(activations)}.\n"
        )
        print("| | after the imports | limit | at most, with page cache | anonymous at most | most growth in a save | time | |")
        print("|---|---|---|---|---|---|---|---|")
        names = {"train": f"{STEPS} steps, a checkpoint every {SAVE}, then `save_model`"}
        names |= {"resume": f"resume from step {STEPS - SAVE}", "memory": "the same with `Trainer`, in memory"}
        runs = {}
        for way, name in names.items():
            runs[way] = under(way, folder, budget, activations)
            print(row(name, runs[way]), flush=True)
        train, resume, memory = runs.values()
        print("\n| phase | begins with, anonymous | at most | time |\n|---|---|---|---|")
        for phase in train.phases:
            print(f"| {phase.name} | {format_size(phase.begins)} | {format_size(phase.most)} | {phase.seconds:.1f} s |")
        known, again = train.last.get("losses", {}), resume.last.get("losses", {})
        right = len(known) == len(again) == STEPS and known == again
        print(f"\nlosses: {', '.join(f'{float.fromhex(loss):.6f}' for loss in known.values())}")
        print(f"those after resuming are {'the same, bit for bit' if right else f'others: {again}'}")
        held = [run.code == 0 and not run.killed and run.peak <= run.limit and run.growth < SAID for run in (train, resume)]
        if not memory.killed:
            print("training in memory was not killed: the limit does not hold, or is no limit for this model")
        return int(not (all(held) and right and memory.killed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
