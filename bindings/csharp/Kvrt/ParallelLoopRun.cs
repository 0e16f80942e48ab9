// One loop that the library hands to the host's threads: each index runs once, and none after the
// loop has returned to the library, whatever the host does.
using System;
using System.Collections.Concurrent;
using System.Runtime.InteropServices;
using System.Threading;

namespace Kvrt
{
    internal sealed class ParallelLoopRun
    {
        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate void BodyFunction(IntPtr context, uint index);

        // The library has few bodies, and each is a function that stays where it is.
        private static readonly ConcurrentDictionary<IntPtr, BodyFunction> Bodies =
            new ConcurrentDictionary<IntPtr, BodyFunction>();

        private readonly BodyFunction body;
        private readonly IntPtr context;
        private readonly int[] taken; // [count]: 1 once somebody runs the index
        private int inside;           // bodies that run now
        private int finished;

        public ParallelLoopRun(uint count, IntPtr body, IntPtr context)
        {
            this.body = Bodies.GetOrAdd(body, Marshal.GetDelegateForFunctionPointer<BodyFunction>);
            this.context = context;
            taken = new int[count];
        }

        /// <summary>What the host calls with each index.</summary>
        public void Run(uint index)
        {
            if (index >= (uint)taken.Length)
            {
                throw new ArgumentOutOfRangeException(
                    nameof(index), $"Index {index} of a loop of {taken.Length}.");
            }
            Interlocked.Increment(ref inside);
            try
            {
                if (Volatile.Read(ref finished) != 0)
                {
                    throw new InvalidOperationException("The loop is over.");
                }
                if (Interlocked.Exchange(ref taken[index], 1) != 0)
                {
                    throw new InvalidOperationException($"Index {index} was run before.");
                }
                body(context, index);
            }
            finally
            {
                Interlocked.Decrement(ref inside);
            }
        }

        /// <summary>Lets no further body in, waits for those that run, and runs what was left out.
        /// </summary>
        public void Finish()
        {
            Interlocked.Exchange(ref finished, 1);
            var wait = new SpinWait();
            while (Volatile.Read(ref inside) != 0)
            {
                wait.SpinOnce();
            }
            for (uint index = 0; index < (uint)taken.Length; ++index)
            {
                if (taken[index] == 0)
                {
                    body(context, index);
                }
            }
        }
    }
}
