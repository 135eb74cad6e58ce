"""User-defined metrics for tests: functions of logits [n, L] and labels [n], tensors in main memory."""


def top2(logits, labels):
    """Return the share of samples whose label is among the two largest logits."""
    return (logits.topk(2).indices == labels[:, None]).any(1).float().mean()


def recalled(logits, labels):
    """Return the balanced accuracy: the mean recall of the labels that occur."""
    hits = logits.argmax(1) == labels
    return float(sum(hits[labels == c].float().mean() for c in labels.unique()) / len(labels.unique()))


def hits(logits, labels):
    """Return the accuracy, as mpifl counts it."""
    return int((logits.argmax(1) == labels).sum()) / len(labels)


def words(logits, labels):
    """Return something that is not a number."""
    return "many"


def broken(logits, labels):
    """Raise an error."""
    raise ZeroDivisionError("of mine")


def accuracy_of_mine(logits, labels):
    """Return 0, under a name like that of existing columns."""
    return 0.0


def train_loss(logits, labels):
    """Return 1, under a name whose columns are free."""
    return 1.0


def top2_again(logits, labels):
    """Return 0, under a name that begins like that of another metric."""
    return 0.0


class Kind:
    """A class instead of a function."""


def error_rate(logits, labels):
    """Return the share of wrong predictions: less is better."""
    return 1 - hits(logits, labels)


error_rate.better = -1


def sideways(logits, labels):
    """Return 0; `better` has an invalid direction."""
    return 0.0


sideways.better = "up"
