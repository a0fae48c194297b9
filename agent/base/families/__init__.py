"""One small file per model family: config.json in, ModelConfig and tensor names out."""
