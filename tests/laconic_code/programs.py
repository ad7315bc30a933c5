"""Programs written for these tests: IR text that every LLVM reads, and C sources of three kinds."""

from __future__ import annotations

LOOP = """
@.str = private constant [4 x i8] c"hey\\00"
%pair = type { i32, %pair* }

define internal i32 @twice(i32 %x) {
  %y = shl nsw i32 %x, 1
  ret i32 %y
}

define i32 @sum(i32* %values, i32 %n) {
entry:
  %some = icmp sgt i32 %n, 0
  br i1 %some, label %loop, label %end

loop:
  %i = phi i32 [ 0, %entry ], [ %next, %more ]
  %total = phi i32 [ 0, %entry ], [ %added, %more ]
  %place = getelementptr i32, i32* %values, i32 %i
  %value = load i32, i32* %place, align 4
  %doubled = call i32 @twice(i32 %value)
  switch i32 %doubled, label %more [
    i32 3, label %end
    i32 -5, label %end
  ]

more:
  %added = add i32 %total, %doubled
  %next = add nuw nsw i32 %i, 1
  %again = icmp slt i32 %next, %n
  br i1 %again, label %loop, label %end

end:
  %result = phi i32 [ 0, %entry ], [ %total, %loop ], [ %total, %loop ], [ %added, %more ]
  ret i32 %result
}
"""

# The same function in the text of LLVM 5, whose pointers have types.
MODERN = LOOP.replace("%pair*", "ptr").replace("i32* ", "ptr ")

SUM = "int f(const int *a, int n) {{ int s = {0}; for (int i = 0; i < n; i++) s += a[i] * {1}; return s; }}\n"
SORT = (
    "void f(float *a, int n) {{ for (int i = {0}; i < n; i++) for (int j = i + 1; j < n; j++)"
    " if (a[j] < a[i] * {1}.5f) {{ float t = a[i]; a[i] = a[j]; a[j] = t; }} }}\n"
)
TEXT = "int f(const char *a) {{ int s = {0}; while (*a) {{ if (*a++ == 'a' + {1}) s++; else s -= 2; }} return s; }}\n"
KINDS = {"sum": SUM, "sort": SORT, "text": TEXT}


def ir(kind: str, first: int, second: int) -> str:
    """A little function of one of three kinds as IR text; the numbers change what a compiler would."""
    body = {
        "sum": f"%r = add nsw i32 %x, {first}\n  %s = mul nsw i32 %r, {second}\n  ret i32 %s",
        "sort": f"%c = icmp slt i32 %x, {first}\n  %s = select i1 %c, i32 %x, i32 {second}\n  ret i32 %s",
        "text": f"%c = xor i32 %x, {first}\n  %d = lshr i32 %c, {second % 31}\n  %s = and i32 %d, 255\n  ret i32 %s",
    }[kind]
    return f"define i32 @f(i32 %x) {{\n  {body}\n}}\n"
