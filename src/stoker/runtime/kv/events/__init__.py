"""Events about the blocks of the prefix index: collected by the step loop, published by a thread in vLLM's format."""
