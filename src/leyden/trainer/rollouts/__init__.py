"""Where a step's episodes come from: tasks, collection, automatic rewards, evaluation."""
