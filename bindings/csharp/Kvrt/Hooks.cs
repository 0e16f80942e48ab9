// What a host may do itself for one pool.
using System;

namespace Kvrt
{
    /// <summary>Runs body(index) once for every index below count, in any order, on any threads,
    /// and returns when all are done.</summary>
    public delegate void ParallelLoop(uint count, Action<uint> body);

    /// <summary>Functions of the host that one pool calls, each optional. They must not call back
    /// into the pool, but for its counters. They live as long as the pool, with all that they
    /// refer to: if they reach the pool itself, the collector never takes it, and
    /// <see cref="Pool.Dispose"/> is the only way to release it. What they throw does not reach the
    /// library: it is thrown from the call during which it happened, behind that call's own error
    /// if it has one.</summary>
    public sealed class Hooks
    {
        /// <summary>Memory of (bytes, alignment), or zero to refuse; comes with
        /// <see cref="Release"/>. Called while the pool is created. The library trusts it to hold
        /// what was asked for.</summary>
        public Func<ulong, ulong, IntPtr> Allocate { get; set; }

        /// <summary>Takes (memory, bytes, alignment) back, when the pool is disposed, or on the
        /// finalizer's thread when that was forgotten.</summary>
        public Action<IntPtr, ulong, ulong> Release { get; set; }

        /// <summary>One line, from any thread that is inside a call.</summary>
        public Action<LogLevel, string> Log { get; set; }

        /// <summary>Monotonic nanoseconds, for the times in reports.</summary>
        public Func<ulong> Now { get; set; }

        /// <summary>Replaces the library's own threads. Whatever it leaves out is run when it
        /// returns or throws, and nothing is run later: results are right all the same.</summary>
        public ParallelLoop ParallelFor { get; set; }
    }
}
