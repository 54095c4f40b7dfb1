// The question for the server's token.

const dialog = document.getElementById("token-dialog");
const form = document.getElementById("token-form");
const field = document.getElementById("token");

/** The token that is typed, or null if the question is dismissed. */
export function askToken(again) {
  document.getElementById("token-words").textContent = again
    ? "The server does not take that token. Give the right one."
    : "This server answers those who have its token.";
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let token = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      token = field.value;
      dialog.close();
    };
    dialog.onclose = () => resolve(token);
  });
}

document.getElementById("token-cancel").addEventListener("click", () => dialog.close());
