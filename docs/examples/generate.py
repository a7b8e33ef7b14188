"""Generate with a model of transformers that is larger than the memory that it is given.

    pip install '.[hf]'
    python docs/examples/generate.py                   # a small Llama with random weights
    python docs/examples/generate.py --model my-llama  # a folder with config.json and safetensors files

The model is put into a store once. Any number of processes may open it afterwards, each with its own budget.
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiered import TieredStore
from tiered.integrations.transformers import import_model, open_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder of the model (default: a small one is made)")
parser.add_argument("--store", default="generate-store", help="folder of the store (default: %(default)s)")
parser.add_argument("--dram", default="2MiB", help="host memory for weights (default: %(default)s)")
parser.add_argument("--prompt", default="The sea is", help="text, given to the model as bytes (default: %(default)s)")
parser.add_argument("--tokens", type=int, default=12, help="how many to generate (default: %(default)s)")
options = parser.parse_args()

torch.manual_seed(0)
if options.model is None:
    options.model = tempfile.mkdtemp()
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(options.model)

with TieredStore.open(options.store, dram=options.dram) as store:  # an import makes units for its own budget
    if not len(store):
        import_model(options.model, store)  # commits; the folder is not needed any more

with TieredStore.open(options.store, dram=options.dram, access="read") as store:
    model = open_model(store)  # reads no weights
    prompt = torch.tensor([list(options.prompt.encode())])
    before = store.statistics().links[0].up.bytes
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.tokens,
        do_sample=False,
        pad_token_id=0,
    )
    read = store.statistics().links[0].up.bytes - before
    weights = sum(store.spec(key).nbytes for key in store)
    print("tokens", tokens[0, prompt.shape[1] :].tolist())
    print(f"{weights:,} bytes of weights, {options.dram} of memory; {read // options.tokens:,} bytes read a token")
