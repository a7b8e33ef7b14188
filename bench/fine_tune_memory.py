"""Does a fine-tuning with Hugging Face's Trainer stay within its memory, with a checkpoint every second step?

    .venv/bin/python -m bench.fine_tune_memory      needs root (a memory cgroup) and some 20 GB of disk
    .venv/bin/python -m bench.fine_tune_memory --quantize nf4 --dram 128MiB     adapters of peft over packed weights (QLoRA)

A Llama of 1 GB of weights (fp32, made at random a tensor at a time, as safetensors files) is trained for six steps of one
sequence, in a store with a budget of 300 MiB. The whole process, its imports included, is in a memory cgroup. After its
imports the limit becomes what it has by then + 1.1 x the budget + 128 MiB + activations. A second process resumes from the
checkpoint of step 4 under the same limit, and has to log the losses of the first, bit for bit. Then the same training with
Trainer and parameters in memory, which the limit kills, to show that it holds. With ``--quantize`` the weights are packed as
they are read, and adapters on all linear layers are trained. Prints Markdown; exits 1 where something is more than was said.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.limited import Ended, anonymous_of, say, under
from bench.llama import config_of, quiet, write_weights
from tiered.types import format_size, parse_size

MIB = 1 << 20
SAID = 128 * MIB
"""What a process may take beside imports, 1.1 x the pool and activations; and what it may grow by while it saves."""
STEPS, SAVE, TOKENS = 6, 2, 32
LAYERS, WIDTH, VOCABULARY = 19, 1024, 8000
RANK = 8
"""Of adapters."""


# -- the child, in the cgroup -------------------------------------------------------------------------------------------------


def child(way: str, folder: Path, budget: int, quantize: str) -> None:
    """Train as ``way`` says: "train", "resume" or "memory". Each line on standard output begins a phase, and waits for one on
    standard input."""
    import torch
    import torch._dynamo
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

    from tiered import TieredStore, zero
    from tiered.integrations.transformers import TieredTrainer, from_pretrained

    torch.set_num_threads(2)
    quiet()
    assert LlamaForCausalLM is not None  # imported before the memory of the imports is read

    class Saves:
        def _save_checkpoint(self, *given: Any, **options: Any) -> None:
            say("save")
            super()._save_checkpoint(*given, **options)  # type: ignore[misc]
            say("train")

    class InMemory(Saves, Trainer):  # type: ignore[misc]
        pass

    class Ours(Saves, TieredTrainer):
        pass

    tokens = torch.randint(0, VOCABULARY, (STEPS, TOKENS), generator=torch.Generator().manual_seed(0))
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
    prepare = None
    if quantize:
        import peft

        torch.manual_seed(0)
        adapter = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")

        def prepare(model: Any) -> Any:
            return peft.get_peft_model(model, adapter)

    def losses(trainer: Any) -> dict[str, str]:
        return {str(one["step"]): float(one["loss"]).hex() for one in trainer.state.log_history if "loss" in one}

    say("imports")
    if way == "memory":
        model = AutoModelForCausalLM.from_pretrained(folder / "weights")
        trainer = InMemory(model if prepare is None else prepare(model), args, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        say("train")
        trainer.train()
        say("end", losses=losses(trainer))
        return
    with TieredStore.open(folder / "store", dram=budget, keep=3) as store:
        say("read")
        existing = "resume" if way == "resume" else "refuse"
        policy: Any = zero.Policy(quantize=quantize or None)  # type: ignore[arg-type]
        model = from_pretrained(
            AutoModelForCausalLM, folder / "weights", store, existing=existing, prepare=prepare, policy=policy
        )
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


def run(way: str, folder: Path, budget: int, activations: int, quantize: str) -> Ended:
    """Run a child in a cgroup that gets its limit once the child has ended its imports."""
    words = ["bench.fine_tune_memory", "--child", way, str(folder), str(budget), quantize]
    return under(words, budget + budget // 10 + SAID + activations, look=anonymous_of)


def growth(ended: Ended) -> int:
    """How much anonymous memory grew at most while it saved a checkpoint."""
    return max((phase.most - phase.begins for phase in ended.phases if phase.name == "save"), default=0)


def activations() -> int:
    """Bytes that autograd keeps of a forward pass beside parameters, counted in models of one and of two such layers, and the
    largest of them once more, for its gradient."""
    import torch
    from transformers import LlamaForCausalLM

    def kept(layers: int) -> tuple[int, int]:
        model = LlamaForCausalLM(config_of(layers, WIDTH, VOCABULARY)).train()
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
    return one + (LAYERS - 1) * (two - one) + largest


def row(what: str, ended: Ended) -> str:
    cells = [what, format_size(ended.imports), format_size(ended.limit), format_size(ended.peak)]
    cells += [format_size(ended.most()), format_size(growth(ended)) if growth(ended) else "-", f"{ended.seconds:.0f} s"]
    cells += [f"killed by the kernel ({ended.killed})" if ended.killed else f"ended with {ended.code}"]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dram", default="300MiB", help="the store's budget (default: 300MiB)")
    parser.add_argument("--dir", default=".", help="where the files are made, and removed (default: .)")
    parser.add_argument("--quantize", default="", choices=["int8", "int4", "nf4"], help="train adapters over packed weights")
    parser.add_argument("--child", nargs=4, metavar=("WAY", "FOLDER", "BYTES", "FORM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), int(options.child[2]), options.child[3])
        return 0
    budget = parse_size(options.dram)
    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="bench-fine-tune-")).resolve()
    try:
        weights, kept = write_weights(folder / "weights", config_of(LAYERS, WIDTH, VOCABULARY)), activations()
        print(
            f"{weights:,} bytes of weights, {format_size(4 * VOCABULARY * WIDTH)} the largest parameter; a budget of "
            f"{format_size(budget)}; activations of a batch of {TOKENS} tokens: {format_size(kept)}.\n"
        )
        print("| | after the imports | limit | at most, with page cache | anonymous at most | most growth in a save | time | |")
        print("|---|---|---|---|---|---|---|---|")
        names = {"train": f"{STEPS} steps, a checkpoint every {SAVE}, then `save_model`"}
        names |= {"resume": f"resume from step {STEPS - SAVE}"}
        if not options.quantize:  # frozen weights are pages of the file, which the kernel drops: nothing is killed
            names |= {"memory": "the same with `Trainer`, in memory"}
        runs = {}
        for way, name in names.items():
            runs[way] = run(way, folder, budget, kept, options.quantize)
            print(row(name, runs[way]), flush=True)
        train, resume, memory = runs["train"], runs["resume"], runs.get("memory")
        print("\n| phase | begins with, anonymous | at most | time |\n|---|---|---|---|")
        for phase in train.phases:
            print(f"| {phase.name} | {format_size(phase.begins)} | {format_size(phase.most)} | {phase.seconds:.1f} s |")
        known, again = train.last.get("losses", {}), resume.last.get("losses", {})
        right = len(known) == len(again) == STEPS and known == again
        print(f"\nlosses: {', '.join(f'{float.fromhex(loss):.6f}' for loss in known.values())}")
        print(f"those after resuming are {'the same, bit for bit' if right else f'others: {again}'}")
        held = [ended.right and ended.peak <= ended.limit and growth(ended) < SAID for ended in (train, resume)]
        killed = memory is None or memory.killed
        if not killed:
            print("training in memory was not killed: the limit does not hold, or is no limit for this model")
        return int(not (all(held) and right and killed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
