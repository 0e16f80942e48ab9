// Who owns a native pool, and how a call keeps it alive while it is inside.
using System;
using System.Runtime.InteropServices;
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

    /// <summary>The native pool for the length of one call: Dispose on another thread waits for
    /// <see cref="Release"/>.</summary>
    internal readonly ref struct PoolLease
    {
        private readonly PoolHandle owner;

        public PoolLease(PoolHandle owner)
        {
            bool added = false;
            owner.DangerousAddRef(ref added);
            this.owner = owner;
            Pool = owner.DangerousGetHandle();
        }

        public IntPtr Pool { get; }

        public void Release()
        {
            owner.DangerousRelease();
        }
    }
}
