"""Multiply-adds and parameters of layers from their definitions, by loops over sizes."""

from __future__ import annotations


def dense(batch, inputs, outputs, bias=True):
    return inputs * outputs + outputs * bias, batch * inputs * outputs


def out_size(n, kernel, stride, padding, dilation=1):
    """How many places a kernel has: tried one by one."""
    span, places, at = dilation * (kernel - 1) + 1, 0, -padding
    while at + span <= n + padding:
        places, at = places + 1, at + stride
    return places


def convolution(batch, inputs, outputs, size, kernel, stride=1, padding=0, dilation=1, groups=1, bias=True):
    parameters = outputs * (inputs // groups) * kernel * kernel + outputs * bias
    place = out_size(size, kernel, stride, padding, dilation)
    work = 0
    for _ in range(outputs):
        work += place * place * (inputs // groups) * kernel * kernel
    return parameters, batch * work, place


def lstm(batch, steps, inputs, hidden, layers=1, gates=4):
    """Four gates (GRU: three), each a product with the input and one with the state, and two biases."""
    parameters = work = 0
    for layer in range(layers):
        width = inputs if layer == 0 else hidden
        parameters += gates * (hidden * width + hidden * hidden + 2 * hidden)
        for _ in range(steps):
            work += batch * gates * (hidden * width + hidden * hidden)
    return parameters, work


def attention(batch, length, width, heads):
    """Three projections in, scores, the mean of values, and one projection out; all with biases."""
    parameters = 4 * (width * width + width)
    head = width // heads
    work = batch * length * width * width * 4
    for _ in range(heads):
        work += batch * length * length * head * 2
    return parameters, work


def vgg(repeats):
    """VGG on a 224×224 image: (parameters, multiply-adds)."""
    parameters = work = 0
    inputs, size = 3, 224
    for outputs, count in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(count):
            more, products, size = convolution(1, inputs, outputs, size, 3, 1, 1)
            parameters, work, inputs = parameters + more, work + products, outputs
        size //= 2
    for a, b in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        more, products = dense(1, a, b)
        parameters, work = parameters + more, work + products
    return parameters, work


def resnet(blocks, bottleneck):
    """ResNet of ImageNet on a 224×224 image, shortcuts by 1×1 convolutions, two values a channel for each norm."""
    total = [0, 0]

    def conv(a, b, size, kernel, stride):
        more, products, out = convolution(1, a, b, size, kernel, stride, kernel // 2, bias=False)
        total[0] += more + 2 * b
        total[1] += products
        return out

    size = conv(3, 64, 224, 7, 2)
    size = out_size(size, 3, 2, 1)
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        outputs = width * 4 if bottleneck else width
        for block in range(count):
            stride = 2 if stage and not block else 1
            if stride > 1 or inputs != outputs:
                conv(inputs, outputs, size, 1, stride)
            if bottleneck:
                conv(inputs, width, size, 1, 1)
                new = conv(width, width, size, 3, stride)
                conv(width, outputs, new, 1, 1)
            else:
                new = conv(inputs, width, size, 3, stride)
                conv(width, outputs, new, 3, 1)
            size, inputs = new, outputs
    more, products = dense(1, inputs, 1000)
    return total[0] + more, total[1] + products


def cifar_resnet(depth):
    """ResNet of CIFAR-10 on a 32×32 image; shortcuts have no weights."""
    parameters, work, size = convolution(1, 3, 16, 32, 3, 1, 1, bias=False)
    parameters, inputs = parameters + 32, 16
    for stage, outputs in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            stride = 2 if stage and not block else 1
            for a, s in ((inputs, stride), (outputs, 1)):
                more, products, size = convolution(1, a, outputs, size, 3, s, 1, bias=False)
                parameters, work = parameters + more + 2 * outputs, work + products
            inputs = outputs
    more, products = dense(1, 64, 10)
    return parameters + more, work + products


def densenet121():
    total = [0, 0]

    def conv(a, b, size, kernel, stride=1):
        more, products, out = convolution(1, a, b, size, kernel, stride, kernel // 2, bias=False)
        total[0] += more
        total[1] += products
        return out

    size = conv(3, 64, 224, 7, 2)
    total[0] += 2 * 64
    size, maps = out_size(size, 3, 2, 1), 64
    for number, count in enumerate((6, 12, 24, 16)):
        if number:
            total[0] += 2 * maps
            conv(maps, maps // 2, size, 1)
            maps, size = maps // 2, size // 2
        for _ in range(count):
            total[0] += 2 * maps + 2 * 128
            conv(maps, 128, size, 1)
            conv(128, 32, size, 3)
            maps += 32
    total[0] += 2 * maps
    more, products = dense(1, maps, 1000)
    return total[0] + more, total[1] + products


def lenet():
    """Two convolutions of 5×5 and two dense layers on a 28×28 image, each convolution pooled by 2."""
    parameters = work = 0
    inputs, size = 1, 28
    for outputs in (20, 50):
        more, products, size = convolution(1, inputs, outputs, size, 5)
        parameters, work, inputs, size = parameters + more, work + products, outputs, size // 2
    for a, b in ((50 * 4 * 4, 500), (500, 10)):
        more, products = dense(1, a, b)
        parameters, work = parameters + more, work + products
    return parameters, work


def alexnet():
    """One column on a 224×224 image; three pools of 3×3 with stride 2."""
    parameters = work = 0
    inputs, size = 3, 224
    for outputs, kernel, stride, padding, pooled in ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False),
                                                     (256, 3, 1, 1, False), (256, 3, 1, 1, True)):
        more, products, size = convolution(1, inputs, outputs, size, kernel, stride, padding)
        parameters, work, inputs = parameters + more, work + products, outputs
        size = out_size(size, 3, 2, 0) if pooled else size
    for a, b in ((256 * size * size, 4096), (4096, 4096), (4096, 1000)):
        more, products = dense(1, a, b)
        parameters, work = parameters + more, work + products
    return parameters, work


def googlenet():
    """Table 1 of the paper with batch norms for biases and 3×3 for 5×5, without the auxiliary heads.

    (1×1, 3×3 reduced, 3×3, 5×5 reduced, 5×5, pooled and projected); sizes are those of pools that round up.
    """
    total = [0, 0]

    def conv(a, b, size, kernel, stride=1):
        more, products, out = convolution(1, a, b, size, kernel, stride, kernel // 2, bias=False)
        total[0] += more + 2 * b
        total[1] += products
        return out

    size = conv(3, 64, 224, 7, 2) // 2
    conv(64, 64, size, 1)
    size = conv(64, 192, size, 3) // 2
    inputs = 192
    table = [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64),
             (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
             (256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)]
    for number, (one, three_reduced, three, five_reduced, five, pooled) in enumerate(table):
        if number in (2, 7):
            size //= 2
        conv(inputs, one, size, 1)
        conv(inputs, three_reduced, size, 1)
        conv(three_reduced, three, size, 3)
        conv(inputs, five_reduced, size, 1)
        conv(five_reduced, five, size, 3)
        conv(inputs, pooled, size, 1)
        inputs = one + three + five + pooled
    more, products = dense(1, inputs, 1000)
    return total[0] + more, total[1] + products
