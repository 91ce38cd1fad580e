"""Models of an exported repository that run inside a real Triton server, in processes of its Python backend.

The exported KIND/1/model.py (templates/model.py.txt) calls the class for its kind in this package. `backend` is the module
triton_python_backend_utils, which exists only in those processes.

- `model`: the base class, which runs requests in an event loop and sends their responses.
- `tokenizer`: preprocessing and postprocessing.
- `engine`: tensorrt_llm, which starts a Stoker executor.
- `bls`: tensorrt_llm_bls, which calls the other three models.
"""
