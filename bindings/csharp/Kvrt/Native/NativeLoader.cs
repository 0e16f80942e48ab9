// Finds libkvrt: the path in KVRT_LIBRARY, else beside this assembly, else the system's loader. A
// failure names all that was tried, each with the loader's own words.
using System;
using System.IO;
using System.Reflection;
using System.Runtime.InteropServices;
using System.Text;

namespace Kvrt.Native
{
    /// <summary>Loads the native library once, before the first call into it. The safe layer does
    /// it by itself. Who calls <see cref="NativeMethods"/> does it in a method before: mono looks a
    /// function up when it compiles a method that calls it, and does not look again.</summary>
    public static class NativeLoader
    {
        /// <summary>The environment variable that names the library's file. When it is set, nothing
        /// else is tried.</summary>
        public const string PathVariable = "KVRT_LIBRARY";

        private const string FileName = "libkvrt.so.0";

        private static readonly object Gate = new object();
        private static volatile bool loaded;

        /// <summary>Loads libkvrt, if that was not done before.</summary>
        /// <exception cref="DllNotFoundException">It is nowhere; the message says where it was
        /// looked for.</exception>
        public static void Load()
        {
            if (loaded)
            {
                return;
            }
            lock (Gate)
            {
                if (!loaded)
                {
                    LoadFirst(Candidates());
                    loaded = true;
                }
            }
        }

        private static string[] Candidates()
        {
            string path = Environment.GetEnvironmentVariable(PathVariable);
            if (!string.IsNullOrEmpty(path))
            {
                return new[] { path };
            }
            string assembly = typeof(NativeLoader).Assembly.Location; // empty in one-file programs
            string folder = string.IsNullOrEmpty(assembly) ? AppContext.BaseDirectory
                                                           : Path.GetDirectoryName(assembly);
            return new[] { Path.Combine(folder, FileName), FileName };
        }

        private static DllNotFoundException NotFound(string attempts)
        {
            return new DllNotFoundException(
                "libkvrt was not found. Tried, in this order:" + attempts + "\nName its file in " +
                PathVariable + ", put " + FileName + " beside Kvrt.dll, or tell the system's " +
                "loader its folder (LD_LIBRARY_PATH, ldconfig).");
        }

#if NETCOREAPP3_0_OR_GREATER
        private static IntPtr library;

        private static void LoadFirst(string[] candidates)
        {
            var attempts = new StringBuilder();
            foreach (string candidate in candidates)
            {
                try
                {
                    library = NativeLibrary.Load(candidate);
                    break;
                }
                catch (Exception error) when (error is DllNotFoundException ||
                                              error is BadImageFormatException)
                {
                    attempts.Append("\n  ").Append(candidate).Append(": ").Append(error.Message);
                }
            }
            if (library == IntPtr.Zero)
            {
                throw NotFound(attempts.ToString());
            }
            NativeLibrary.SetDllImportResolver(typeof(NativeLoader).Assembly, Resolve);
        }

        private static IntPtr Resolve(string name, Assembly assembly, DllImportSearchPath? search)
        {
            return name == NativeMethods.LibraryName ? library : IntPtr.Zero;
        }
#else
        // mono has no resolvers, but a map: Kvrt.dll.config sends DllImport("kvrt") to the symbols
        // of the whole process, which the library joins here.
        private const int Now = 2;
        private const int Global = 0x100;

        [DllImport("libdl.so.2", CallingConvention = CallingConvention.Cdecl)]
        private static extern unsafe IntPtr dlopen(byte* path, int mode);

        [DllImport("libdl.so.2", CallingConvention = CallingConvention.Cdecl)]
        private static extern IntPtr dlerror();

        private static unsafe void LoadFirst(string[] candidates)
        {
            if (Environment.OSVersion.Platform != PlatformID.Unix)
            {
                return; // the runtime's own search has to do
            }
            var attempts = new StringBuilder();
            foreach (string candidate in candidates)
            {
                fixed (byte* path = Encoding.UTF8.GetBytes(candidate + "\0"))
                {
                    if (dlopen(path, Now | Global) != IntPtr.Zero)
                    {
                        return;
                    }
                }
                attempts.Append("\n  ").Append(candidate).Append(": ")
                    .Append(Marshal.PtrToStringAnsi(dlerror()));
            }
            throw NotFound(attempts.ToString());
        }
#endif
    }
}
