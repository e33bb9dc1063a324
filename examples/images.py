"""Sixteen captions of one image, and a page read region by region.

Run: python examples/images.py --model Qwen/Qwen3-VL-2B-Instruct --image page.png

Without --model, a tiny model with random weights writes noise, which shows what is computed once. Needs Pillow.
"""

import argparse

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_parallel

REGIONS = ["Top left", "Top right", "Bottom left", "Bottom right"]


def tiny_model():
    """Return a tiny random Gemma 3 with a processor, for the tokenizer of the demo model."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    _, tokenizer = hf_parallel.load_embedded_model()
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens.values())})
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    template = (
        "{% for m in messages %}{% for part in m['content'] %}{{ part.get('text', '<boi>') }}{% endfor %}{% endfor %}"
    )
    processor = transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**shape, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer), "sliding_window": 256}
    config = transformers.Gemma3Config(
        text_config={**text, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0},
        vision_config={**shape, "image_size": 64, "patch_size": 8},
        mm_tokens_per_image=16,
        image_token_index=tokenizer.image_token_id,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval(), processor


def main():
    parser = argparse.ArgumentParser(description="Captions of an image, and a page read region by region")
    parser.add_argument("--model", help="a model of the Hub or a folder (default: a tiny random one)")
    parser.add_argument("--image", help="a file (default: a drawn image)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a caption and of a region")
    options = parser.parse_args()
    if options.model is None:
        model, processor = tiny_model()
    else:
        model = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto", device_map="auto")
        processor = AutoProcessor.from_pretrained(options.model)
    hf_parallel.enable(model)
    image = Image.linear_gradient("L").convert("RGB") if options.image is None else Image.open(options.image)

    def ask(question):
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return processor.apply_chat_template([{"role": "user", "content": content}], **settings).to(model.device)

    inputs = ask("Describe the image in one sentence.")
    out = model.generate(
        **inputs,
        generation_mode="shared_prefix",
        num_return_sequences=16,
        do_sample=True,
        seed=0,
        max_new_tokens=options.tokens,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    for caption in processor.tokenizer.batch_decode(new, skip_special_tokens=True)[:3]:
        print(" ".join(caption.split())[:80])
    print(f"{len(new)} captions; {out.stats.prefilled_tokens} tokens of the prompt computed once")

    out = model.generate(
        **ask("Transcribe the text in each quarter of this page."),
        generation_mode="pdos",
        tokenizer=processor.tokenizer,
        titles=REGIONS,
        opening="The page, quarter by quarter.\n",
        branch_stops=["\n"],
        do_sample=False,
        max_new_tokens=options.tokens * (len(REGIONS) + 2),
        max_blocks=1,
        return_dict_in_generate=True,
    )
    for branch in out.blocks[0][0].branches:
        print(f"{branch.title}: {' '.join(branch.text.split())[:80]}")
    print(f"{len(REGIONS)} regions; {out.stats.decoded_tokens} tokens in {out.stats.forward_passes} forward passes")


if __name__ == "__main__":
    main()

# Prints:
#   16 captions; ... tokens of the prompt computed once
#   Top left: ...
#   4 regions; ... tokens in ... forward passes
