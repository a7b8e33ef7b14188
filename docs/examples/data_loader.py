"""Feed a DataLoader's workers from a store, while a job goes on writing to it.

    python docs/examples/data_loader.py --samples 256 --workers 2

Each worker reads the commit from which the data set was made, with a small pool of its own.
"""

import argparse

import torch
from torch.utils.data import DataLoader

from tiered import TieredDataset, TieredStore


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256, help="pictures of 12 KiB (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    classes = torch.randn(4, 3, 32, 32)
    with TieredStore.open("pictures-store", dram="16MiB") as store:
        for number in range(options.samples):
            store.put(f"image/{number}", classes[number % 4] + torch.randn(3, 32, 32))
            store.put(f"label/{number}", torch.tensor(number % 4))
        store.commit()

        samples = [{"image": f"image/{number}", "label": f"label/{number}"} for number in range(options.samples)]
        data = TieredDataset(store, samples, dram="4MiB")  # the budget of each process
        loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=options.workers)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(2):
            right = 0
            for batch in loader:
                scores = model(batch["image"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((scores.argmax(1) == batch["label"]).sum())
            print(f"epoch {epoch}: {right} of {options.samples} right")
            store.put("epoch", torch.tensor(epoch))
            store.commit()  # the workers go on with the commit that they have


if __name__ == "__main__":  # workers may be spawned
    main()
