"""Search: score candidates while they are written, drop the worst, fork the best. Run: python examples/search.py"""

from __future__ import annotations

import hf_parallel


def main() -> None:
    """Print the tree of candidates of one prompt, and the best one."""
    model, tokenizer = hf_parallel.load_embedded_model()
    hf_parallel.enable(model)
    messages = [{"role": "user", "content": "Write two sentences about a lighthouse."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output = model.generate(
        **inputs,
        generation_mode="search",
        width=8,
        interval=8,
        keep=2,
        do_sample=True,
        max_new_tokens=48,
        seed=0,
        tokenizer=tokenizer,
        return_dict_in_generate=True,
    )
    for index, branch in enumerate(output.trees[0]):
        origin = "the prompt" if branch.parent is None else f"candidate {branch.parent + 1}"
        print(f"candidate {index + 1} continues {origin}, {branch.outcome}: {branch.text!r}")
    print(f"\nBest: candidate {output.chosen[0] + 1}, score {output.ratings[0]:.2f}")
    print(f"{output.stats.decoded_tokens} tokens decoded, {output.stats.prefilled_tokens} prefilled")


if __name__ == "__main__":
    main()
