from tests.interpreter import triton

__all__ = ["triton"]
