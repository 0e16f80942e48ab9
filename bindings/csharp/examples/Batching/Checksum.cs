// FNV-1a, 64 bits: the checksum of traces and of replayed outputs.
using System;

namespace Batching
{
    public struct Checksum
    {
        private const ulong Offset = 0xcbf29ce484222325, Prime = 0x100000001b3;

        private ulong difference; // from the start value, so that the default is a fresh checksum

        public ulong Value => difference ^ Offset;

        public void Add(ReadOnlySpan<byte> bytes)
        {
            ulong value = Value;
            foreach (byte one in bytes)
            {
                value = unchecked((value ^ one) * Prime);
            }
            difference = value ^ Offset;
        }
    }
}
