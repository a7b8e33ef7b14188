"""Save and restore what training needs beside its tensors."""
