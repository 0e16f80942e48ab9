// Who owns a native pool, and how a call keeps it alive while it is inside.
using System;
using System.Runtime.InteropServices;
using System.Threading;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>Owns a kv_pool. It is released when its last lease ends after it was disposed, or
    /// by the collector.</summary>
    internal sealed class PoolHandle : SafeHandle
    {
        private HookState hooks;

        public PoolHandle() : base(IntPtr.Zero, true) { }

        public override bool IsInvalid => handle == IntPtr.Zero;

        public void Adopt(IntPtr pool, HookState poolHooks)
        {
            SetHandle(pool);
            hooks = poolHooks;
        }

        protected override bool ReleaseHandle()
        {
            NativeMethods.kv_pool_release(handle);
            hooks?.Free();
            return true;
        }
    }

    /// <summary>The native pool for the length of one call: when it was disposed meanwhile, it goes
    /// with <see cref="Release"/>.</summary>
    internal readonly ref struct PoolLease
    {
        private readonly PoolHandle owner;
        private readonly object turn;

        /// <summary>With a turn: calls that name the same object come one after the other.
        /// </summary>
        public PoolLease(PoolHandle owner, object turn)
        {
            bool added = false;
            owner.DangerousAddRef(ref added);
            this.owner = owner;
            this.turn = turn;
            if (turn != null)
            {
                Monitor.Enter(turn);
            }
            Pool = owner.DangerousGetHandle();
        }

        public IntPtr Pool { get; }

        public void Release()
        {
            if (turn != null)
            {
                Monitor.Exit(turn);
            }
            owner.DangerousRelease();
        }
    }
}
