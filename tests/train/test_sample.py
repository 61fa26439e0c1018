"""Text from a model: the seed decides, the window bounds what it sees, a zero byte ends it."""

import torch

from crosscut.train.sample import generate


class Counting(torch.nn.Module):
    """Says the byte after the last one; remembers how much it was shown."""

    def __init__(self, sharpness=50.0):
        super().__init__()
        self.sharpness, self.seen = sharpness, []

    def forward(self, ids):
        self.seen.append(ids.size(1))
        return torch.nn.functional.one_hot((ids + 1) % 256, 256).float() * self.sharpness


def test_it_goes_on_from_the_prompt_and_sees_no_more_than_the_window():
    model = Counting()
    assert generate(model, b"abc", 6, window=5, temperature=0) == b"abcdefghi"
    assert model.seen == [4, 5, 5, 5, 5, 5]  # the prompt and the zero byte that begins a file


def test_it_ends_where_the_model_ends_the_file():
    assert generate(Counting(), bytes([252]), 10, window=8, temperature=0) == bytes([252, 253, 254, 255])
    assert generate(Counting(), b"x", 0, window=8) == b"x"


def test_the_seed_decides_and_a_low_temperature_is_the_likeliest():
    flat = Counting(sharpness=1.0)
    texts = [generate(flat, b"a", 30, window=8, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert generate(Counting(5.0), b"a", 20, window=8, temperature=0.05) == generate(
        flat, b"a", 20, window=8, temperature=0
    )
