"""What an exported repository runs inside a real Triton server: `<kind>.py` becomes `<kind>/1/model.py`."""
