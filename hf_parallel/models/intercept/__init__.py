"""Every place where the package's code takes the place of a model's own, and what restores the model.

A model stays the user's: other threads run it as it is, and `hf_parallel.disable` leaves every attribute as `enable`
found it. `tests/models/test_intercept.py` checks that. With another version of Transformers, PEFT or torch, check this
table. Tested with Transformers 5.17 and 5.24, torch 2.13 and PEFT 0.21.

==================================  =======================  =================================  ========================
what is replaced                    how long                 what restores it                   where
==================================  =======================  =================================  ========================
class of the model (`generate`,     until `disable`          `disable`                          `classes.py`,
`_sample` and other steps of it)                                                                `generation/mixin.py`
what `_sample` does, by a thread    one call of `generate`   the call, at its end               `generation/enabled.py`
local that names the call
class of the model's configs        a pass                   the last pass that uses a config   `classes.py`,
(`_attn_implementation`)                                                                        `attention.py`
attention and mask functions        the process, under       not needed: they refuse or do      `attention.py`,
(interfaces of Transformers)        names of their own       nothing outside of passes          `training/attention.py`
`_compiled_call_impl` of decoder    a compiled decode step   the step                           `modules.py`,
layers                                                                                          `decode/compiled.py`
`_compiled_call_impl` of mixers     from the first pass      `disable`: other threads may be    `modules.py`,
                                    until `disable`          in a pass                          `mixers.py`
attributes of mixers that hold      one call of a mixer      the call                           `mixers.py`
states
`forward` of linear layers, norms,  a call, or while an      its end                            `modules.py`, `cpu/`
activations, attention layers,      engine is open
routers and experts on a CPU
PyTorch's products and gates in a   one call of the module   the call                           `cpu/own_products.py`
router or experts
(`TorchFunctionMode`)
PyTorch's products and sums of a    a pass                   the pass                           `gpu/invariant_ops.py`
model with `batch_invariant=True`
on a GPU (`TorchDispatchMode`)
globals of a copy of a `forward`:   a call, or while an      its end: the copy is a `forward`   `functions.py`,
rotary function of attention,       engine is open           as above                           `cpu/elementwise.py`,
gates of any module                                                                             `cpu/gates.py`
`forward` of fused projections      a compiled decode step   the step                           `modules.py`,
                                                                                                `decode/fused.py`
storage of fused projections: one   from the first compiled  `disable`                          `decode/fused.py`
tensor for several weights (CUDA)   step until `disable`
forward hooks of rotary embeddings  a pass                   the pass                           `rotary.py`
forward hooks of all modules, and   while `enable` probes    `enable`                           `probing/mixers.py`,
attributes with their last states                                                               `modules.py`
forward hooks of the model in       until `disable`; a pass  `disable`; the pass                `training/attention.py`,
training                                                                                        `training/tree.py`
`gradient_checkpointing` and the    a call, or while an      its end; the pass                  `modules.py`,
function of checkpoints             engine is open; a pass                                      `training/states.py`
PEFT's attributes of the active     a pass                   the pass                           `adapters.py`
adapter
settings of Dynamo                  a compiled decode step   the step                           `compiler.py`
`GGUFReader` and                    the load of a GGUF       the load; other threads get        `loading/gguf_reader.py`
`get_tensor_name_map` of gguf       file                     gguf's own
==================================  =======================  =================================  ========================

Nothing else of Transformers, PEFT or torch is replaced: no module's globals, and no method of a class. The pass of
Inductor (`decode/fused.py`) is an option of `torch.compile`.

What all threads see (`forward`, `_compiled_call_impl`, the class of a config) asks a context variable whether this
thread runs a pass, and runs the model's own code otherwise. The exceptions are linear layers, whose results differ from
PyTorch's in rounding only, `gradient_checkpointing`, and the active adapter, which all threads see during a pass.
"""
