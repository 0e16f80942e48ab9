// The callbacks that the library calls, and the state of one pool's hooks behind their user
// pointer. No exception leaves them.
using System;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Text;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>One pool's hooks, alive until <see cref="Free"/>.</summary>
    internal sealed unsafe class HookState
    {
        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate IntPtr AllocateFunction(IntPtr user, UIntPtr bytes, UIntPtr alignment);

        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate void ReleaseFunction(
            IntPtr user, IntPtr memory, UIntPtr bytes, UIntPtr alignment);

        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate void LogFunction(IntPtr user, int level, byte* text, UIntPtr length);

        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate ulong NowFunction(IntPtr user);

        [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
        private delegate void ParallelForFunction(
            IntPtr user, uint count, IntPtr body, IntPtr context);

        // Static, so that their native entry points live as long as the process.
        private static readonly AllocateFunction AllocateCallback = Allocate;
        private static readonly ReleaseFunction ReleaseCallback = Release;
        private static readonly LogFunction LogCallback = Log;
        private static readonly NowFunction NowCallback = Now;
        private static readonly ParallelForFunction ParallelForCallback = ParallelFor;

        /// <summary>How many hooks this thread is inside of.</summary>
        [ThreadStatic]
        private static int depth;

        /// <summary>What a hook threw in the call that this thread is inside of: the library calls
        /// hooks on the thread of the call.</summary>
        [ThreadStatic]
        private static ExceptionDispatchInfo pending;

        private readonly Func<ulong, ulong, IntPtr> allocate;
        private readonly Action<IntPtr, ulong, ulong> release;
        private readonly Action<LogLevel, string> log;
        private readonly Func<ulong> now;
        private readonly ParallelLoop parallelFor;
        private GCHandle self; // what the user pointer leads to; strong: it outlives the pool

        public HookState(Hooks hooks)
        {
            allocate = hooks.Allocate;
            release = hooks.Release;
            log = hooks.Log;
            now = hooks.Now;
            parallelFor = hooks.ParallelFor;
            self = GCHandle.Alloc(this);
        }

        public void Free()
        {
            self.Free();
        }

        /// <summary>The struct for kv_pool_create, which copies it.</summary>
        public kv_hooks Describe()
        {
            kv_hooks hooks = default;
            hooks.struct_size = (uint)sizeof(kv_hooks);
            hooks.user = (void*)GCHandle.ToIntPtr(self);
            hooks.allocate = Pointer(allocate, AllocateCallback);
            hooks.release = Pointer(release, ReleaseCallback);
            hooks.log = Pointer(log, LogCallback);
            hooks.now = Pointer(now, NowCallback);
            hooks.parallel_for = Pointer(parallelFor, ParallelForCallback);
            return hooks;
        }

        /// <summary>Calling back would wait for a lock that this very thread holds.</summary>
        public static void RefuseReentry()
        {
            if (depth != 0)
            {
                throw new KvrtArgumentException(
                    Status.Invalid, "a hook calls back into a pool: return from the hook first");
            }
        }

        /// <summary>A call begins, of which nothing is known yet: a finalizer has nobody to tell
        /// what it left.</summary>
        public static void ForgetPending()
        {
            pending = null;
        }

        /// <summary>What a hook threw in this thread's call, or null.</summary>
        public static ExceptionDispatchInfo TakePending()
        {
            ExceptionDispatchInfo thrown = pending;
            pending = null;
            return thrown;
        }

        private static IntPtr Pointer<T>(Delegate hook, T callback)
        {
            return hook == null ? IntPtr.Zero : Marshal.GetFunctionPointerForDelegate<T>(callback);
        }

        private static HookState Of(IntPtr user)
        {
            return (HookState)GCHandle.FromIntPtr(user).Target;
        }

        /// <summary>A hook begins: what calls on other pools inside it leave is not of the call
        /// around it, whose exception so far is returned.</summary>
        private static ExceptionDispatchInfo Begin()
        {
            ++depth;
            return TakePending();
        }

        private static void Keep(Exception error)
        {
            pending = ExceptionDispatchInfo.Capture(error);
        }

        /// <summary>The hook ends; of several exceptions in one call the first is kept.</summary>
        private static void End(ExceptionDispatchInfo before)
        {
            --depth;
            pending = before ?? pending;
        }

        private static IntPtr Allocate(IntPtr user, UIntPtr bytes, UIntPtr alignment)
        {
            HookState state = Of(user);
            ExceptionDispatchInfo before = Begin();
            try
            {
                IntPtr memory = state.allocate((ulong)bytes, (ulong)alignment);
                if ((ulong)memory.ToInt64() % (ulong)alignment == 0)
                {
                    return memory;
                }
                state.release?.Invoke(memory, (ulong)bytes, (ulong)alignment);
                throw new InvalidOperationException(
                    $"Hooks.Allocate returned memory that is not aligned to {alignment} bytes.");
            }
            catch (Exception error)
            {
                Keep(error);
                return IntPtr.Zero;
            }
            finally
            {
                End(before);
            }
        }

        private static void Release(IntPtr user, IntPtr memory, UIntPtr bytes, UIntPtr alignment)
        {
            HookState state = Of(user);
            ExceptionDispatchInfo before = Begin();
            try
            {
                state.release(memory, (ulong)bytes, (ulong)alignment);
            }
            catch (Exception error)
            {
                Keep(error);
            }
            finally
            {
                End(before);
            }
        }

        private static void Log(IntPtr user, int level, byte* text, UIntPtr length)
        {
            HookState state = Of(user);
            ExceptionDispatchInfo before = Begin();
            try
            {
                state.log((LogLevel)level, Encoding.UTF8.GetString(text, checked((int)length)));
            }
            catch (Exception error)
            {
                Keep(error);
            }
            finally
            {
                End(before);
            }
        }

        private static ulong Now(IntPtr user)
        {
            HookState state = Of(user);
            ExceptionDispatchInfo before = Begin();
            try
            {
                return state.now();
            }
            catch (Exception error)
            {
                Keep(error);
                return 0;
            }
            finally
            {
                End(before);
            }
        }

        private static void ParallelFor(IntPtr user, uint count, IntPtr body, IntPtr context)
        {
            HookState state = Of(user);
            ParallelLoopRun loop = null;
            ExceptionDispatchInfo before = Begin();
            try
            {
                loop = new ParallelLoopRun(count, body, context);
                state.parallelFor(count, loop.Run);
            }
            catch (Exception error)
            {
                Keep(error);
            }
            finally
            {
                loop?.Finish();
                End(before);
            }
        }
    }
}
