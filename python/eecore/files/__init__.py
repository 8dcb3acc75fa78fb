"""What others give: files, JSON, tensors, repositories; read within bounds, written whole."""
