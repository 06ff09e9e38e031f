"""The ops: reference, ONNX form and fast forms, one folder each."""
