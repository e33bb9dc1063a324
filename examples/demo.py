"""Workers over one shared cache, then shared prefixes compared with plain `generate`. Run: python examples/demo.py

All statements about speed and equality of tokens are measured while the demo runs.
"""

import argparse
import time

import torch

import hf_parallel
from hf_parallel.generation.presets import PRESETS
from hf_parallel.models.loading import load_model
from hf_parallel.models.loading.embedded import MODEL_NAME

TASK = "Plan a picnic in the park for ten people."
REMARK = "Our guest liked the garden, the quiet rooms, the breakfast and the view of the lake. "
SHOWN = 4  # sampled completions that are printed
NEXT_STEPS = """    import hf_parallel
    hf_parallel.enable(model)       # most decoder-only models
    model.generate(**inputs, generation_mode="shared_prefix",
                   num_return_sequences=16, do_sample=True)

docs/modes/          all modes and their settings
make bench ARGS=shared_prefix    the same comparison in full, with continuous batching
make demo ARGS='--task "Write a song about the sea."'
make demo ARGS="--model Qwen/Qwen3-0.6B"
.venv/bin/hf-parallel generate --mode hogwild "Plan a day in Rome."
.venv/bin/hf-parallel serve      all modes in a browser: http://127.0.0.1:8000/
"""


def main(arguments=None):
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, takes a few seconds")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="a chat model (default: the embedded one)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of each worker (128)")
    parser.add_argument("--task", default=TASK, metavar="TEXT", help=f"task of the workers ({TASK})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
    options = parser.parse_args(arguments)
    print(f"Loading {options.model or MODEL_NAME} ...\n", flush=True)
    model, tokenizer = load_model(options.model)
    hf_parallel.enable(model)
    try:
        show_workers(model, tokenizer, options)
    except KeyboardInterrupt:
        print("Stopped; on to the second part (Ctrl-C again to exit).\n")
    except hf_parallel.UnsupportedModelError as error:
        print(f"Skipped: {error}\n")
    sizes = {"length": 96, "rows": 4, "new": 6} if options.quick else {"length": 1024, "rows": 16, "new": 24}
    show_shared_prefix(model, tokenizer, options.seed, **sizes)
    print(f"\n3. Your own model\n\n{NEXT_STEPS}")


def show_workers(model, tokenizer, options):
    """Show workers that generate concurrently."""
    config = hf_parallel.HogwildConfig(seed=options.seed)
    prompt = hf_parallel.hogwild_prompt(options.task, tokenizer, config)
    print(f"1. {config.num_workers} workers, one KV cache\n")
    print(
        f"{' and '.join(config.names)} are rows of one batch over one KV cache. Each sees the text of the others token "
        "by token, and a finished step moves into their common history.\n"
    )
    print(f"Task: {options.task}\n")
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    passes = options.max_new_tokens or (24 if options.quick else 128)
    settings = {**PRESETS["hogwild"]["embedded"].generation, "max_new_tokens": passes, "return_dict_in_generate": True}
    streamer = hf_parallel.ConsoleStreamer(tokenizer)
    output = model.generate(**inputs, **settings, parallel_config=config, tokenizer=tokenizer, streamer=streamer)
    moved, stats = sum(step.forward_pass is not None for step in output.history[0]), output.stats
    print(f"\n{output.record.passes} passes, {stats.decoded_tokens} tokens. {moved} steps moved into the history.")
    print(f"The cache stores every token once: {stats.kv_bytes / 1e6:.1f} MB.\n")
    if output.answers[0] is not None:
        print(f"Answer: {output.answers[0]}\n")


def show_shared_prefix(model, tokenizer, seed, length, rows, new):
    """Compare completions of one prompt by plain `generate` and over a shared prefix, and show sampled ones."""
    mode = "shared_prefix"
    prompt = tokenizer(REMARK * length, truncation=True, max_length=length, return_tensors="pt")
    ids = prompt["input_ids"].to(model.device)
    device = f"the CPU ({torch.get_num_threads()} threads)" if model.device.type == "cpu" else str(model.device)
    print(f"2. One prompt, {rows} completions\n")
    print(
        f"A prompt of {length} tokens, {rows} completions of {new} tokens, greedy, float32, on {device}. "
        f"The same call of generate, without and with generation_mode={mode!r}:\n"
    )
    batch = ids.repeat(rows, 1)
    settings = {
        "attention_mask": torch.ones_like(batch),
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
    }
    model.generate(batch, generation_mode=mode, **settings)  # warm-up
    plain, alone = measure(model, batch, generation_mode=None, **settings)
    shared, together = measure(model, batch, generation_mode=mode, **settings)
    print(f"generate       {alone:6.1f} s\n{mode}  {together:6.1f} s, {alone / together:.1f} times as fast")
    same = torch.equal(plain, shared)
    print(f"\nsame tokens: {'yes' if same else 'NO'} (compared just now: {rows} x {new})\n")
    print(f"Sampled, {SHOWN} of {rows} completions:")
    sampling = {
        **PRESETS["hogwild"]["embedded"].generation,
        "seed": seed,
        "max_new_tokens": new,
        "generation_mode": mode,
    }
    for row in model.generate(ids, num_return_sequences=rows, **sampling)[:SHOWN, length:]:
        print(f"- {' '.join(tokenizer.decode(row, skip_special_tokens=True).split())}")


def measure(model, ids, **settings):
    """Return the sequences of a call of `generate`, and its seconds."""
    began = time.perf_counter()
    return model.generate(ids, **settings).cpu(), time.perf_counter() - began


if __name__ == "__main__":
    main()
