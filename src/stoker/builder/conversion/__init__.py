"""The conversion of checkpoint tensors to engine tensors: which make which, in what layout, and on which rank."""
